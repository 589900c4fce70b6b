package disks

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The parts of ext4's superblock that tell its size (kernel documentation, filesystems/ext4/globals: super block).
const (
	ext4Superblock  = 1024 // offset on the device
	ext4BlocksLow   = 0x4
	ext4LogBlock    = 0x18
	ext4Magic       = 0x38
	ext4Incompat    = 0x60
	ext4BlocksHigh  = 0x150
	ext4MagicNumber = 0xef53
	ext4Incompat64  = 0x80
)

// ext4Resize is EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64) (include/uapi/linux/ext4.h).
const ext4Resize = 0x40086610

// growExt4 gives the mounted file system all of its device.
func growExt4(node, dir string) error {
	f, err := os.Open(node)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	have, blockSize, err := ext4Blocks(f)
	if err != nil {
		return err
	}
	want := uint64(size) / blockSize
	if want <= have {
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, d.Fd(), ext4Resize, uintptr(unsafe.Pointer(&want)))
	runtime.KeepAlive(&want)
	if errno != 0 {
		return fmt.Errorf("from %d to %d blocks of %d bytes: %w", have, want, blockSize, errno)
	}
	return nil
}

// ext4Blocks reads how many blocks of which size the file system on a device has.
func ext4Blocks(device io.ReaderAt) (blocks, size uint64, err error) {
	b := make([]byte, 1024)
	if _, err := device.ReadAt(b, ext4Superblock); err != nil {
		return 0, 0, err
	}
	log := binary.LittleEndian.Uint32(b[ext4LogBlock:])
	if binary.LittleEndian.Uint16(b[ext4Magic:]) != ext4MagicNumber || log > 6 {
		return 0, 0, errors.New("no ext4 superblock")
	}
	blocks = uint64(binary.LittleEndian.Uint32(b[ext4BlocksLow:]))
	if binary.LittleEndian.Uint32(b[ext4Incompat:])&ext4Incompat64 != 0 {
		blocks |= uint64(binary.LittleEndian.Uint32(b[ext4BlocksHigh:])) << 32
	}
	return blocks, 1024 << log, nil
}
