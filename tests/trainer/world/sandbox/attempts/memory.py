"""Take memory without end."""

held = []
while True:
    held.append(bytearray(b"x" * 2**20))
