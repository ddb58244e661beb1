def install(): pass
