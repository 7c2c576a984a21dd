"""Take 16 GiB at once."""

held = bytearray(16 * 2**30)
print("through:", len(held))
