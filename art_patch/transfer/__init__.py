"""Records to files that others read, and back.

`conversation` says what of a trajectory goes out, `rows` makes the rows of training files from it, `complete` keeps
everything, `foreign` reads what others wrote, `files` moves rows to and from a disk. All but the last are pure; the
command line reads and writes the store.
"""
