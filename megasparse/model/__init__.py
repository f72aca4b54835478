"""Models: embeddings and positions, blocks (reversible or ordinary), and the decoder and encoder built of them."""
