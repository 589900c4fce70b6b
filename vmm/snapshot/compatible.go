package snapshot

import (
	"fmt"
	"math"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/vmm"
)

// tscTolerance is how far the host's counter may be from what the guest takes it for, in parts per million: what NTP can
// make up for (adjtimex(2) takes 500).
const tscTolerance = 250

// Compatible says what keeps the machine from being restored with what the host has. Platform.Guest doesn't matter.
func (i *Info) Compatible(host vmm.Platform) error {
	if i.DisksOnly() {
		return errDisksOnly
	}
	for _, d := range []struct {
		what        string
		saved, have any
	}{
		{"board version", i.Platform.Board, host.Board},
		{"QEMU", i.Platform.QEMU, host.QEMU},
		{"accelerator", i.Platform.Accel, host.Accel},
		{"CPU", i.Platform.CPU, host.CPU},
	} {
		if d.saved != d.have {
			return incompatible("it was saved with %s %v, but here is %v", d.what, d.saved, d.have)
		}
	}
	if ppm := math.Abs(float64(i.Platform.TSCKHz-host.TSCKHz)) / float64(host.TSCKHz) * 1e6; ppm > tscTolerance {
		return incompatible("it was saved with a time stamp counter of %d kHz, but here are %d", i.Platform.TSCKHz, host.TSCKHz)
	}
	return nil
}

var errDisksOnly = incompatible("only its disks were saved")

func incompatible(format string, args ...any) error {
	return errdefs.ErrFailedPrecondition.WithMessage("the snapshot can't be restored on this host: " + fmt.Sprintf(format, args...))
}
