"""Messages of drivers and workers, and the weights that they share."""
