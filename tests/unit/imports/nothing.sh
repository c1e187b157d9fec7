python3 --nothing 1
