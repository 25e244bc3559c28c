"""Directories that are complete or absent: corpus, checkpoint and bundle.

An artifact is a directory with `manifest.json`: its kind, schema version, what made it, and name,
size and SHA-256 of every file but `README.md`. Locally it is written under a temporary name in the
destination's folder, synced and renamed. An object store has no rename, so data files are uploaded
first and the manifest last. Readers ignore a directory without a verified manifest.

    path_errors    the system's errors as messages that name the path
    whole_files    files and folders that appear at once, with all their content
    remote         URLs of object stores and of the Hugging Face Hub
    manifest       what an artifact consists of, and whether it still does
    artifact       artifacts are made, opened, linked and locked
    work_folder    folders that a command goes on with, found and locked
    cache          this machine's copies of remote artifacts
"""
