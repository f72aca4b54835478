"""What a trained model is worth: held-out bits/dim, the compressors' figures beside it, and text it writes."""
