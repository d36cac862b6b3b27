"""Makes the pictures of the pages, of real runs, so that they can be made again: `make pictures`."""
