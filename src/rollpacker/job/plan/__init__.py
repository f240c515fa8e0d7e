"""A job before it starts: its configuration checked, its parts built, its checkpoint found."""
