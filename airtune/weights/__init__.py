"""Where one weight is: its bytes in the checkpoint, the layout they make, the budget and visit it has."""
