"""`medarc_train env`: environments made, installed, checked and tried."""
