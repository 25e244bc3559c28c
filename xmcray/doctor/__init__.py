"""The checks of `xmcray doctor`: what would break a run here, or let others run code, and the remedy."""
