"""Transfer engines of others, behind our small interface. Each is an extra of the package and off unless asked for."""
