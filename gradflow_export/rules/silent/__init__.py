"""Rules about silent mistakes: what trains without an error and yet learns nothing, or the wrong thing."""
