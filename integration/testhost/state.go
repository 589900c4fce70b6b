package testhost

import "github.com/cubesandbox/cube/internal/netstate"

// state is what the host's network is made of.
func (h *Host) state() (all []string, err error) {
	err = h.Do(func() (err error) {
		all, err = netstate.Take(UplinkDevice)
		return err
	})
	return all, err
}
