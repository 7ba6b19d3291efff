"""Preprocessing of pictures for a model: decoding, resizing as in training, and cutting into patches.

Does not depend on tensors or the engine. Needs Pillow, the extra ``vision``.
"""
