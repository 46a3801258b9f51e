"""What the owner may set, how quantities are written, and how much of this device plans may use."""
