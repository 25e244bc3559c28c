"""The checks of `xmcray doctor`: what would break a run or let others run code, and the remedy."""
