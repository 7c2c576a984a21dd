"""Write a huge file."""

from attempt import attempted

with attempted() as through:
    with open("huge", "wb") as file:
        for _ in range(1024):
            file.write(bytes(2**20))
    through("1 GiB")
