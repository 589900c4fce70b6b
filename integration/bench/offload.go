package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// segmentation turns frames of many segments on or off at the path's ends. Off, all there is between them sees a frame for
// each segment.
func (p *path) segmentation(on bool) error {
	set := func() error {
		return errors.Join(setFeature("eth0", unix.ETHTOOL_STSO, on), setFeature("eth0", unix.ETHTOOL_SGSO, on))
	}
	return errors.Join(p.client.Do(set), p.internet.Do(set))
}

// setFeature is ethtool(8)'s -K.
func setFeature(device string, command uint32, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ command, data uint32 }{command: command} // struct ethtool_value
	if on {
		value.data = 1
	}
	request := struct { // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	runtime.KeepAlive(&value)
	if errno != 0 {
		return fmt.Errorf("set offload %#x of %s: %w", command, device, os.NewSyscallError("SIOCETHTOOL", errno))
	}
	return nil
}
