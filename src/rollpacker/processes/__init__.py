"""Child processes and the frames that they exchange with the driver."""
