package bpf

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// TestUnfit: a kernel is unfit for what it says that it hasn't, and not for what couldn't be asked.
func TestUnfit(t *testing.T) {
	no := fmt.Errorf("it says: %w", ebpf.ErrNotSupported)
	for _, tc := range []struct {
		name        string
		types, read error
		lockdown    string
		says        string // "": fit
	}{
		{name: "all there"},
		{name: "locked down, but for integrity", lockdown: "none [integrity] confidentiality\n"},
		{name: "not to be asked", types: unix.EPERM, read: unix.EPERM, lockdown: "none integrity [confidentiality]\n"},
		{name: "no types", types: no, says: "CONFIG_DEBUG_INFO_BTF"},
		{name: "no types nor helper", types: no, read: no, says: "CONFIG_DEBUG_INFO_BTF"},
		{name: "locked down", read: no, lockdown: "none integrity [confidentiality]\n", says: "lockdown=integrity"},
		{name: "no helper", read: no, lockdown: "[none] integrity confidentiality\n", says: "CONFIG_BPF_EVENTS"},
	} {
		u := unfit(tc.types, tc.read, tc.lockdown)
		switch {
		case (u == nil) != (tc.says == ""):
			t.Errorf("%s: %v", tc.name, u)
		case u != nil && (!strings.Contains(u.Error(), tc.says) || !errors.Is(u, errdefs.ErrNotImplemented)):
			t.Errorf("%s: %v", tc.name, u)
		}
	}
}

// TestCheckKernel: a kernel on which the other tests pass is fit.
func TestCheckKernel(t *testing.T) {
	if u := CheckKernel(); u != nil {
		t.Error(u)
	}
}
