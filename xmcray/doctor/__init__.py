"""`xmcray doctor`: what of this machine, or of a cluster, would break a run or open it to others, and what to do."""
