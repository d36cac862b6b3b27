"""What the tests of several rings share."""
