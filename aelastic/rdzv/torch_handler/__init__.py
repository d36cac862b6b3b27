"""Any torch `RendezvousHandler` as a link of ours."""
