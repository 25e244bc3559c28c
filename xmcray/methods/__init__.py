"""One file per training method; see base.py for what the loop expects of them."""
