import ctypes
import os

from attempt import FACTS, attempted

PAGE, LIBC = 4096, ctypes.CDLL(None)
LIBC.sbrk.restype = ctypes.c_void_p
half = FACTS["half"].encode()
reading, writing = os.pipe()


def after(page: bytes) -> bool:
    """Whether the half is followed by itself turned round, which as a whole this program never has."""
    place = page.find(half)
    while place >= 0:
        rest = page[place + len(half) : place + 2 * len(half)]
        if len(rest) == len(half) and all(rest[i] == half[-1 - i] for i in range(len(half))):
            return True
        place = page.find(half, place + 1)
    return False


with attempted() as through:
    found = 0
    middle, end = id(object()) // PAGE * PAGE, LIBC.sbrk(0) // PAGE * PAGE
    state = ctypes.create_string_buffer(1)
    looked = 0
    for first, last in ((middle - 2**27, middle + 2**27), (end - 2**26, end)):
        for address in range(first, last, PAGE):
            if LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), state) != 0:
                continue
            # The kernel looks for us whether it can be read.
            if LIBC.write(writing, ctypes.c_void_p(address), ctypes.c_size_t(PAGE)) == PAGE:
                looked += 1
                found += after(os.read(reading, PAGE))
    if found:
        through(f"on {found} pages")
    assert looked > 1000, "it did not look"
    raise KeyError
