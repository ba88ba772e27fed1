"""What the package uses itself; nothing here is for users."""
