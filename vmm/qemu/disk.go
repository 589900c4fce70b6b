package qemu

import (
	"fmt"
	"regexp"
)

// serialNumber is what a disk may be called: 20 characters are all of the serial number that Linux shows of a SCSI disk.
var serialNumber = regexp.MustCompile(`^[a-z0-9-]{1,20}$`)

// Disk is a raw image behind a SCSI disk. It can be on the command line or be plugged in later.
type Disk struct {
	Serial   string
	FDSet    int // the image's descriptor is in this set; 0 for a placeholder
	FD       int // the descriptor itself; only on the command line
	Bus      string
	LUN      int
	ReadOnly bool
	// Placeholder is the size of a disk without an image, in bytes.
	Placeholder int64
}

// Valid says what is wrong with the disk.
func (d Disk) Valid() error {
	if !serialNumber.MatchString(d.Serial) {
		return fmt.Errorf("disk serial %q is not 1–20 characters of a–z, 0–9 and -", d.Serial)
	}
	if (d.FDSet < 1) == (d.Placeholder < 1) || d.LUN < 0 || d.LUN > maxLUN || d.Bus == "" {
		return fmt.Errorf("disk %+v", d)
	}
	return nil
}

// Params are the options of a disk that is there from the start.
func (d Disk) Params() ([]string, error) {
	blockdev, err := marshal(d.blockdev(), "", nil)
	if err != nil {
		return nil, err
	}
	scsi, err := marshal(d.device(), "", nil)
	if err != nil {
		return nil, err
	}
	params := []string{"-blockdev", blockdev, "-device", scsi}
	if d.Placeholder > 0 {
		return params, nil
	}
	if err := validFD("disk "+d.Serial, d.FD); err != nil {
		return nil, err
	}
	return append([]string{"-add-fd", fmt.Sprintf("fd=%d,set=%d", d.FD, d.FDSet)}, params...), nil
}

func (d Disk) node() string { return "image-" + d.Serial }
func (d Disk) id() string   { return "disk-" + d.Serial }

// blockdev are the arguments of blockdev-add and the value of -blockdev.
func (d Disk) blockdev() map[string]any {
	if d.Placeholder > 0 {
		return map[string]any{"driver": "null-co", "node-name": d.node(), "size": d.Placeholder, "read-zeroes": true}
	}
	return map[string]any{
		"driver":    "raw",
		"node-name": d.node(),
		"read-only": d.ReadOnly,
		"discard":   "unmap", // what the guest trims, the store gets back
		"file": map[string]any{
			"driver":    "file",
			"filename":  fmt.Sprintf("/dev/fdset/%d", d.FDSet),
			"read-only": d.ReadOnly,
			"discard":   "unmap",
		},
	}
}

// device are the arguments of device_add and the value of -device.
func (d Disk) device() map[string]any {
	m := map[string]any{
		"driver":  "scsi-hd",
		"id":      d.id(),
		"drive":   d.node(),
		"bus":     d.Bus,
		"channel": 0,
		"scsi-id": 0,
		"lun":     d.LUN,
		"serial":  d.Serial,
	}
	if !d.ReadOnly {
		// A full store stops the machine, which goes on when there is space, instead of breaking the guest's file
		// system. All other errors are the guest's.
		m["werror"] = "enospc"
	}
	return m
}
