"""Environment variables of Ray that undo its protection; importable without Ray."""

# With one of these, Ray Data unpickles what a data file holds.
UNPICKLING = ("RAY_DATA_AUTOLOAD_PICKLE_OBJECT_SCALAR", "RAY_DATA_AUTOLOAD_PYEXTENSIONTYPE")
