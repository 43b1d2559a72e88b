"""Whether a run can work here: what each machine has, and what all processes do together."""
