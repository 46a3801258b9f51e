"""Trust: keys, pairing by a code, the lists of trusted devices."""
