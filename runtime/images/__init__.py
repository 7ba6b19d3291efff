"""Pictures on their way to a model: decoded, resized as the model was trained on them, cut into patches.

Knows no tensors and no engine. Needs Pillow, the extra ``vision``.
"""
