"""Models: embeddings and positions, blocks (reversible or ordinary), and the decoder built of them."""
