"""What the heads attend to: the weights of a sentence pair, the word alignments that are made of them, and pictures."""
