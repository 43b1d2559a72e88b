"""The training loops and what they share.

`assemble` is the only place where the other folders meet.
"""
