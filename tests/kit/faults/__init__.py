"""Jobs of real agents under fire: networks that can be cut, workers that die of each other, and what each fault may cost."""
