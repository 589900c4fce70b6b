package qemu

import (
	"encoding/json"
	"fmt"
	"net"
	"regexp"
)

// identifier is what QEMU takes as an id (id_wellformed, util/id.c), at a length that also fits a block node's name.
var identifier = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._-]{0,30}$`)

func validID(what, id string) error {
	if !identifier.MatchString(id) {
		return fmt.Errorf("%s: %q is not an id", what, id)
	}
	return nil
}

func validFD(what string, fd int) error {
	if fd < 3 {
		return fmt.Errorf("%s: descriptor %d", what, fd)
	}
	return nil
}

// device is the value of a -device option.
func device(driver, id string, props map[string]any) (string, error) {
	m := map[string]any{"driver": driver}
	return marshal(m, id, props)
}

// object is the value of an -object option.
func object(kind, id string, props map[string]any) (string, error) {
	m := map[string]any{"qom-type": kind}
	return marshal(m, id, props)
}

func marshal(m map[string]any, id string, props map[string]any) (string, error) {
	if id != "" {
		m["id"] = id
	}
	for k, v := range props {
		m[k] = v
	}
	b, err := json.Marshal(m) // sorts the keys
	return string(b), err
}

// SocketChardev is one end of a connected socket, handed over as a descriptor. Others use it by its ID.
type SocketChardev struct {
	ID string
	FD int
}

// Valid says what is wrong with the device.
func (d SocketChardev) Valid() error {
	if err := validID("chardev", d.ID); err != nil {
		return err
	}
	return validFD("chardev "+d.ID, d.FD)
}

// Params are the device's options. -chardev takes no JSON.
func (d SocketChardev) Params() ([]string, error) {
	return []string{"-chardev", fmt.Sprintf("socket,id=%s,fd=%d", d.ID, d.FD)}, nil
}

// Monitor is a QMP server on a chardev.
type Monitor struct{ Chardev string }

// Valid says what is wrong with the device.
func (d Monitor) Valid() error { return validID("monitor", d.Chardev) }

// Params are the device's options.
func (d Monitor) Params() ([]string, error) {
	return []string{"-mon", "mode=control,chardev=" + d.Chardev}, nil
}

// Serial is the board's serial port on a chardev.
type Serial struct{ Chardev string }

// Valid says what is wrong with the device.
func (d Serial) Valid() error { return validID("serial port", d.Chardev) }

// Params are the device's options.
func (d Serial) Params() ([]string, error) {
	return []string{"-serial", "chardev:" + d.Chardev}, nil
}

// VirtioSerial is the controller of SerialPorts.
type VirtioSerial struct {
	ID       string
	MaxPorts int // port 0, which is a console's, included
}

// Valid says what is wrong with the device.
func (d VirtioSerial) Valid() error {
	if d.MaxPorts < 2 || d.MaxPorts > 31 { // QEMU's default
		return fmt.Errorf("virtio-serial %s: %d ports", d.ID, d.MaxPorts)
	}
	return validID("virtio-serial", d.ID)
}

// Params are the device's options.
func (d VirtioSerial) Params() ([]string, error) {
	v, err := device("virtio-serial-device", d.ID, map[string]any{"max_ports": d.MaxPorts})
	return []string{"-device", v}, err
}

// SerialPort is a byte channel that the guest finds by Name.
type SerialPort struct {
	ID      string
	Chardev string
	Bus     string // "<controller>.0"
	Number  int
	Name    string
}

// Valid says what is wrong with the device.
func (d SerialPort) Valid() error {
	if d.Name == "" || d.Number < 1 || d.Bus == "" {
		return fmt.Errorf("serial port %+v", d)
	}
	if err := validID("serial port", d.Chardev); err != nil {
		return err
	}
	return validID("serial port", d.ID)
}

// Params are the device's options.
func (d SerialPort) Params() ([]string, error) {
	v, err := device("virtserialport", d.ID, map[string]any{
		"chardev": d.Chardev, "bus": d.Bus, "nr": d.Number, "name": d.Name,
	})
	return []string{"-device", v}, err
}

// SCSIController is what disks are plugged into.
type SCSIController struct{ ID string }

// Valid says what is wrong with the device.
func (d SCSIController) Valid() error { return validID("scsi controller", d.ID) }

// Params are the device's options.
func (d SCSIController) Params() ([]string, error) {
	v, err := device("virtio-scsi-device", d.ID, nil)
	return []string{"-device", v}, err
}

// Tap is a NIC on a tap that is handed over as a descriptor.
type Tap struct {
	ID  string
	FD  int
	MAC net.HardwareAddr
}

// Valid says what is wrong with the device.
func (d Tap) Valid() error {
	if len(d.MAC) != 6 {
		return fmt.Errorf("nic %s: address %q", d.ID, d.MAC)
	}
	if err := validFD("nic "+d.ID, d.FD); err != nil {
		return err
	}
	return validID("nic", d.ID)
}

// Params are the device's options.
func (d Tap) Params() ([]string, error) {
	backend := "net-" + d.ID
	netdev, err := marshal(map[string]any{"type": "tap"}, backend, map[string]any{"fd": fmt.Sprint(d.FD)})
	if err != nil {
		return nil, err
	}
	nic, err := device("virtio-net-device", d.ID, map[string]any{
		"netdev": backend, "mac": d.MAC.String(),
		// With it a restored guest would announce itself, and QEMU crashes on the guest's reset when it is to do that 0 times.
		"guest_announce": false,
	})
	return []string{"-netdev", netdev, "-device", nic}, err
}
