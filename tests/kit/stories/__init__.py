"""Stories that several tests tell: of cores, of launches, of event logs."""
