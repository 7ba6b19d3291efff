"""Small decoders that propose tokens: EAGLE-3's, and prediction layers."""
