"""Plans rings of devices, forms them, serves from them and backs up their KV cache."""
