"""How weights travel: publisher and version store on the sender's side, matching names and receivers on the other."""
