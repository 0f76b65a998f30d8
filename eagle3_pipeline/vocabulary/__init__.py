"""The draft's vocabulary: which tokens of the target the draft may propose, and the map between both."""
