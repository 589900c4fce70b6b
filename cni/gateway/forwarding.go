package gateway

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// forwarding is what there was to restore on a host that forwarded nothing (ip_forward was 0) before Up.
type forwarding struct {
	AcceptRedirects string   `json:"accept_redirects"`  // of all devices; the kernel changes it together with ip_forward
	Devices         []string `json:"devices,omitempty"` // those, and "default", that forwarded all the same
}

// observeForwarding returns nil where the host forwards already.
func observeForwarding() (*forwarding, error) {
	on, err := getSysctl(ipForward)
	if err != nil || on != "0" {
		return nil, err
	}
	f := &forwarding{}
	if f.AcceptRedirects, err = getSysctl(acceptRedirects); err != nil {
		return nil, err
	}
	devices, err := os.ReadDir(filepath.Join(sysctls, "ipv4/conf"))
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	for _, d := range devices {
		if d.Name() == "all" {
			continue
		}
		if v, err := getSysctl(forwardingOf(d.Name())); err == nil && v == "1" { // or it has gone
			f.Devices = append(f.Devices, d.Name())
		}
	}
	return f, nil
}

// restore has the host forward nothing again.
func (f *forwarding) restore() error {
	if err := setSysctl(ipForward, "0"); err != nil {
		return err
	}
	var errs []error
	for _, d := range f.Devices {
		if err := setSysctl(forwardingOf(d), "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, setSysctl(acceptRedirects, f.AcceptRedirects))...)
}
