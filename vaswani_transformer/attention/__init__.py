"""What the heads attend to: attention weights, word alignments made of them, pictures and the page to explore them."""
