"""Names, messages and tables as text for a terminal or a page."""
