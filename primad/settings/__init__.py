"""The owner's settings, the notation of quantities, and the limits of what plans may use of this device."""
