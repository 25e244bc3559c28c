"""Who owns which label, and how ranks exchange vectors and scores. Plain torch.distributed, no
Ray.
"""
