package main

import "unsafe"

// pointer is an ioctl's argument.
func pointer(r *[2]uint64) uintptr { return uintptr(unsafe.Pointer(r)) }
