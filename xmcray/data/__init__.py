"""Raw text becomes batches: readers, tokens, the corpus on disk, and which queries form a step."""
