"""Who may speak with this device: keys, pairing by a code, the lists of trusted devices."""
