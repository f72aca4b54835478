"""Attention mechanisms of other papers, to which the papers of this project compare theirs."""
