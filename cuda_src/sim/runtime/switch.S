// cki_sim_switch(void** save, void* load): saves the callee's registers, stores the stack pointer in *save, takes `load` as the
// new one and restores. A new fiber's stack is prepared to look like a saved one (fiber.cpp).
#if defined(__x86_64__) || defined(__aarch64__)
        .text
        .globl  cki_sim_switch
        .hidden cki_sim_switch
        .type   cki_sim_switch, %function
        .balign 16
#endif
#if defined(__x86_64__)
// System V ABI: six registers.
cki_sim_switch:
        pushq   %rbp
        pushq   %rbx
        pushq   %r12
        pushq   %r13
        pushq   %r14
        pushq   %r15
        movq    %rsp, (%rdi)
        movq    %rsi, %rsp
        popq    %r15
        popq    %r14
        popq    %r13
        popq    %r12
        popq    %rbx
        popq    %rbp
        ret
#elif defined(__aarch64__)
// AAPCS64: x19-x30 and the low halves of v8-v15. A new fiber starts where its saved x30 points.
cki_sim_switch:
        sub     sp, sp, #160
        stp     x19, x20, [sp, #0]
        stp     x21, x22, [sp, #16]
        stp     x23, x24, [sp, #32]
        stp     x25, x26, [sp, #48]
        stp     x27, x28, [sp, #64]
        stp     x29, x30, [sp, #80]
        stp     d8, d9, [sp, #96]
        stp     d10, d11, [sp, #112]
        stp     d12, d13, [sp, #128]
        stp     d14, d15, [sp, #144]
        mov     x9, sp
        str     x9, [x0]
        mov     sp, x1
        ldp     x19, x20, [sp, #0]
        ldp     x21, x22, [sp, #16]
        ldp     x23, x24, [sp, #32]
        ldp     x25, x26, [sp, #48]
        ldp     x27, x28, [sp, #64]
        ldp     x29, x30, [sp, #80]
        ldp     d8, d9, [sp, #96]
        ldp     d10, d11, [sp, #112]
        ldp     d12, d13, [sp, #128]
        ldp     d14, d15, [sp, #144]
        add     sp, sp, #160
        ret
#endif
#if defined(__x86_64__) || defined(__aarch64__)
        .size   cki_sim_switch, .-cki_sim_switch
        .section .note.GNU-stack, "", %progbits
#endif
